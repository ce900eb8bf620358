"""Forecasts beside published results: rows of a table, each expressed as a plan of this package."""
