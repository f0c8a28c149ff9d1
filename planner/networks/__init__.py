"""planner/networks"""
