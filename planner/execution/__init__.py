"""planner/execution"""
