"""Pages and pictures made of results; nothing is planned here."""
