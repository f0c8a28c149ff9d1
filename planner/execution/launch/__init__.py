"""How processes find one another, what is checked before they start, and what is seen of them while they run."""
