"""simulator/calibration"""
