"""planner/sharding"""
