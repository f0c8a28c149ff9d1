"""Networks to plans, and plans to runs."""
