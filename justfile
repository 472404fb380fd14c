# Short names for the commands of this project; each can be typed by hand as well.

# Run the tests.
test *args:
    pytest {{args}}

# Check style and types.
lint:
    ruff check .
    ruff format --check .
    mypy

# Mend style.
fix:
    ruff check --fix .
    ruff format .

# Write the shell completion files and the pages made from the code anew.
generate:
    python completions/generate.py
    python docs/generate.py

# Write the demo's checkpoints anew with torch and megatron-core.
demo-data:
    rm -rf src/ckpttool/demo_data
    python -m tests.builders demo src/ckpttool/demo_data

# Measure against the bars.
bench *args:
    python -m benchmarks {{args}}

# Everything that CI runs.
ci:
    bash .ci/run
