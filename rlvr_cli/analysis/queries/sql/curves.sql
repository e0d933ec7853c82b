-- A training run step by step: rewards, groups with a signal, lengths, entropy, clipping, gradient norm.
-- plot: x=step y=eval_reward,train_reward,groups_with_signal,length,entropy,grad_norm,clip_fraction

SELECT
    run_id,
    step,
    max(wall_seconds) FILTER (name <> 'step/seconds') AS wall_seconds,  -- which is known after the batch's last update
    max(wall_seconds) FILTER (phase = 'eval' AND name = 'reward/mean') AS eval_wall_seconds,
    any_value(value) FILTER (phase = 'eval' AND name = 'reward/mean') AS eval_reward,
    any_value(value) FILTER (phase = 'eval' AND name = 'reward/samples') AS eval_samples,
    any_value(value) FILTER (phase = 'train' AND name = 'reward/mean') AS train_reward,
    any_value(value) FILTER (phase = 'train' AND name = 'reward/format') AS train_format_reward,
    any_value(value) FILTER (phase = 'train' AND name = 'groups/signal_share') AS groups_with_signal,
    any_value(value) FILTER (phase = 'train' AND name = 'length/mean') AS length,
    any_value(value) FILTER (phase = 'train' AND name = 'length/correct') AS length_correct,
    any_value(value) FILTER (phase = 'train' AND name = 'length/wrong') AS length_wrong,
    any_value(value) FILTER (phase = 'train' AND name = 'length/truncated_share') AS truncated_share,
    any_value(value) FILTER (phase = 'train' AND name = 'policy/entropy') AS entropy,
    any_value(value) FILTER (phase = 'train' AND name = 'policy/clip_fraction') AS clip_fraction,
    any_value(value) FILTER (phase = 'train' AND name = 'optimizer/grad_norm') AS grad_norm
FROM metrics
WHERE run_id NOT IN (SELECT run_id FROM runs WHERE command IN ('discover', 'pairwise'))  -- whose rewards are scores, and wins
GROUP BY run_id, step
ORDER BY run_id, step;
