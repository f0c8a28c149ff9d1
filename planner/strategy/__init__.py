"""Plans, and the file that keeps one."""
