#!/bin/sh
# From images to an accuracy in some minutes on two cores: a V-MoE with 8 experts in two of its four
# blocks. `make quickstart-images` installs and runs this.
#
#     sh configs/quickstart/run-images.sh [SOURCE]     SOURCE as of data.path; default: digits
#
# An interrupted quickstart continues; to start over, remove runs/quickstart-images.
set -eu
images=${1:-digits}
folder=runs/quickstart-images
config=configs/quickstart/vmoe.yaml  # found in the package, too, where there is no clone
larger=
# Digits have 8 x 8 pixels, and images of other sources such as CIFAR more.
[ "$images" = digits ] || larger="data.path=$images model.image_size=32 model.patch_size=4 data.augmentation.flip=true"
began=$(date +%s)

step() { printf '\n== %s\n' "$1" >&2; }

step "1/4  train with expert parallelism over 2 processes and ZeRO 1, to step 1000"
# The schedule spans all 2000 steps, so that continuing does not change it.
[ -d $folder/run/checkpoints/step-00001000 ] ||
    polyad launch $config --processes-per-node 2 $larger train.steps=1000 schedule.decay_steps=2000

step "2/4  continue in 2 new processes from the sharded checkpoint of step 1000"
polyad launch $config --processes-per-node 2 $larger

step "3/4  evaluate on the validation split"
polyad evaluate $folder/run --json $folder/validation.json

step "4/4  write the report"
polyad report $folder/run
echo
python -m polyad.train.evaluation.summary $folder/run $folder/validation.json
cat <<END
continued          at step 1000 in new processes, from $folder/run/checkpoints/step-00001000
run folder         $folder/run
curves             tensorboard --logdir $folder/run/tensorboard
report             $folder/run/report.html: images and patches of each expert
time               $(($(date +%s) - began)) s

Next:
  a page of the images and patches that each expert gets  polyad report $folder/run --top 12
  which classes each expert serves                        polyad experts specialize $folder/run
  the accuracy on another split                           polyad evaluate $folder/run --split train
END
