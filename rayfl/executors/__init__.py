"""Where jobs run: in this process, or on Ray. Nothing here knows a method or a model."""
