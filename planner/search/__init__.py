"""Search: the strategies of all operators that make a step fastest under a memory limit."""
