"""What the language-model example needs of MindSpore: the model as cells, a step, the job, the checks. The rest is in `lm/`."""
