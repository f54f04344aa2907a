"""Export of submodels as files for other programs: safetensors, and a program for plain torch."""
