"""`ttrain doctor`: checks that training is right and fits, by functions that return findings."""
