python -m sglang.launch_server --model-path embedded --speculative-algorithm EAGLE3 \
    --speculative-draft-model-path export/eagle3 \
    --speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6 \
    --speculative-adaptive --speculative-adaptive-config adaptive.json
