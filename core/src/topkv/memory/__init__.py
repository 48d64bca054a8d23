"""Memory of both tiers, and the representation pools of algorithms. Read ``manager`` first."""
