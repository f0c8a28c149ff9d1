"""planner/graph"""
