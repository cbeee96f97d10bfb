"""Decisions, pure: given `now_s`, no await, clock, random, environment, log or metric. Shared with the simulator."""
