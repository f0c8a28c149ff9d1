"""What ranks train on: samples by number, from files or made up, and the loader of each rank."""
