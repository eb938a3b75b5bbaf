"""What the speculation policy knows of a pair of models: seconds, acceptance, and speeds of draft shapes, predicted and measured."""
