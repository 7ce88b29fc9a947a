"""Models and adapters, in the formats of transformers and PEFT."""
