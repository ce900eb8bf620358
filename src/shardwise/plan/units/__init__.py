"""Model → units: which parameters are gathered together. Nothing here changes the model."""
