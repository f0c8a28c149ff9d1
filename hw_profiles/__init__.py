"""hw_profiles"""
