"""Softmax attention across ranks: ways to bring K/V to Q."""
