"""What pytest leaves alone: a script that runs where MindSpore is."""

collect_ignore = ["mindspore_judge.py"]
