"""planner/strategy"""
