"""Ranks: real processes, simulated threads, and the one record that both leave."""
