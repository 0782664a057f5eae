"""The parts of `pipeline_timeline.py`: the stages that it runs, and the recorded run."""
