"""planner/search"""
