"""Forecasts beside what this machine takes: calibrated step times, and processes' peaks."""
