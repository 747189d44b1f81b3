#!/bin/sh
# From text to a perplexity in some minutes on two cores: a GPT-2 whose feed-forwards are mixtures of
# 8 experts, on the source code of Python's own library. `make quickstart` installs and runs this.
#
# Nothing here is special: each line is a command that you can type. A step whose result is there is
# left out, so an interrupted quickstart continues; to start over, remove runs/quickstart.
set -eu
folder=runs/quickstart
config=configs/quickstart/gpt2-smoe.yaml  # found in the package, too, where there is no clone
began=$(date +%s)

step() { printf '\n== %s\n' "$1" >&2; }

step "1/5  prepare: Python's standard library -> a byte-level BPE -> tokens"
[ -d $folder/data ] ||
    polyad prepare --source python-stdlib --tokenizer train:8192 --output $folder/data \
        --validation-fraction 0.02 --test-fraction 0.02

step "2/5  train with expert parallelism over 2 processes and ZeRO 1, to step 100"
# The schedule spans all 200 steps, so that continuing does not change it.
[ -d $folder/run/checkpoints/step-00000100 ] ||
    polyad launch $config --processes-per-node 2 train.steps=100 schedule.decay_steps=200

step "3/5  continue in 2 new processes from the sharded checkpoint of step 100"
polyad launch $config --processes-per-node 2

step "4/5  evaluate on the validation split"
polyad evaluate $folder/run --json $folder/validation.json

step "5/5  compare with a unigram model on the same tokens"
echo
python -m polyad.train.evaluation.summary $folder/run $folder/validation.json
cat <<END
continued         at step 100 in new processes, from $folder/run/checkpoints/step-00000100
run folder        $folder/run
curves            tensorboard --logdir $folder/run/tensorboard
time              $(($(date +%s) - began)) s

Next:
  a page of what each expert is for, to open in a browser  polyad report $folder/run
  the experts of every token                               polyad experts trace $folder/run --output $folder/run/experts.parquet
  text of the model                                        polyad generate $folder/run --prompt 'def '
END
