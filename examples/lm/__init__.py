"""The parts of the language-model example, one question per file.

`train_lm.py` puts them together: the text, the model, its layout on a mesh, one step, the report, the checkpoint and
the check. What needs no framework is shared with `train_lm_mindspore.py`: configuration, text, initial weights, layout, report.
"""
