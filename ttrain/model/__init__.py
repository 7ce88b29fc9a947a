"""Models and adapters, all in formats that transformers and PEFT open."""
