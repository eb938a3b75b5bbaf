"""What pays on the user's models, prompts and machine: costs measured, speeds predicted and run."""
