"""The trainer on two hosts, under faults at random, for as long as it is told."""
