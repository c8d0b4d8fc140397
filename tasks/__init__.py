"""One module per data set; prompts. Knows nobody else in specbench."""
