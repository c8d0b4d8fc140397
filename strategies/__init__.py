"""One module per decoding strategy; verification; drafters."""
