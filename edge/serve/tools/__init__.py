"""Tool calling: functions in prompts, constraints on calls, and recognition of calls in answers."""
