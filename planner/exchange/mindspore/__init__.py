"""How a network is to be parallel, said in MindSpore's words: keys, modes and files."""
