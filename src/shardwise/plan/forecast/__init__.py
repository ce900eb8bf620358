"""Forecasts of a training step from its plan: what it computes, keeps and takes."""
