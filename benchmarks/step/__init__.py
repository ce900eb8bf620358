"""One training step, beside every rival: time, memory, bytes sent, bytes copied, host time."""
