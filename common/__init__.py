"""What all else stands on: files, errors, command lines, pictures, statistics. Imports nothing of ours."""
