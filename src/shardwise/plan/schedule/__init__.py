"""Order and strategy → events. Pure: no torch, no network, no clock."""
