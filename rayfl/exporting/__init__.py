"""Write a submodel as files for other programs: safetensors, and a program that plain torch runs."""
