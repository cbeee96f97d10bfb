"""Measurements: what the router costs, beside its peers, and what it does where engines, clients and time are bad."""
