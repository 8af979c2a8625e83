"""The engine: original forwards, recomputations, and what is saved between the two."""
