"""`ttrain doctor`: checks that training is right and fits, each a function of the parts that a stage trains with."""
