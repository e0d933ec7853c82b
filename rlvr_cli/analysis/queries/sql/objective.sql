-- What other normalizations would have made of the same rollouts: whose tokens are pushed how far, by correctness, length, difficulty.
-- :loss_type = null
-- :std_normalization = null
-- :length_normalization = null
-- :normalize_constant = null
-- :kind = null
-- :phase = "train"
-- plot: x=bucket y=push_share+other_push_share panels=kind bars=yes zeros=push_share,other_push_share title="Share of the push" y_label="share of |weight|"

-- A response's tokens weigh its advantage, divided by its length (masked_mean, always with gspo), by the mean length (token_mean) or by a
-- constant (masked_normalize), or, with kimi, by nothing: the derivative of the objective, before the mean over responses, on policy. A loss of
-- the user's own counts as one per token with a baseline. Null parameters are the run's own. The sum of a response's tokens is the
-- response's weight. Left out: groups that --dynamic-sampling dropped, and, but for what they are to their groups, responses without a
-- token. :kind = "response" lists the responses.
-- push_share is a bucket's share of the sum over all tokens of |weight|: the size of an
-- objective as a whole does not matter to AdamW.
WITH choices AS (
    SELECT
        run_id,
        own,
        if(own, config ->> 'loss_type', coalesce($loss_type::VARCHAR, config ->> 'loss_type')) AS loss_type,
        if(own, NULL, $std_normalization::VARCHAR) AS wanted_std,
        coalesce(
            config ->> 'std_normalization',
            if((config ->> 'use_std_normalization')::BOOLEAN, 'group', 'none')
        ) AS own_std,
        if(own, NULL, $length_normalization::VARCHAR) AS wanted_length,
        config ->> 'length_normalization' AS own_length,
        coalesce(
            if(own, NULL, $normalize_constant::DOUBLE),
            (config ->> 'normalize_constant')::DOUBLE,
            (config ->> 'sampling_max_tokens')::DOUBLE
        ) AS constant,
        (config ->> 'advantage_eps')::DOUBLE AS eps,
        config ->> 'credit' AS credit
    FROM runs, (VALUES (true), (false)) AS sides (own)
), checked AS (
    SELECT
        run_id, own, loss_type, constant, coalesce(eps, 1e-6) AS eps,
        coalesce(wanted_std, own_std) AS std,
        if(loss_type = 'gspo', 'masked_mean', coalesce(wanted_length, own_length)) AS length,
        CASE
            WHEN coalesce(wanted_std, own_std) NOT IN ('group', 'batch', 'none')
            THEN 'std_normalization is group, batch or none'
            WHEN coalesce(wanted_length, own_length) NOT IN ('masked_mean', 'masked_normalize', 'token_mean')
            THEN 'length_normalization is masked_mean, masked_normalize or token_mean'
            WHEN loss_type = 'kimi' AND wanted_length IS NOT NULL
            THEN 'length_normalization has no effect on ' || run_id || ': kimi divides by no length'
            WHEN loss_type = 'gspo' AND wanted_length <> length
            THEN 'length_normalization has no effect on ' || run_id || ': gspo divides by the length of each response'
            WHEN loss_type IN ('kimi', 'gspo') AND NOT own AND $normalize_constant IS NOT NULL
            THEN 'normalize_constant has no effect on ' || run_id || ': ' || loss_type || ' divides by no constant'
            WHEN $normalize_constant IS NOT NULL AND NOT own AND length <> 'masked_normalize'
            THEN 'normalize_constant has no effect on ' || run_id || ' without --length-normalization masked_normalize'
            WHEN loss_type <> 'no_baseline' AND $loss_type::VARCHAR = loss_type AND loss_type NOT IN (
                'reinforce_with_baseline', 'grpo_no_clip', 'grpo_clip', 'gspo', 'cispo', 'kimi'
            ) THEN 'loss_type is no_baseline, or any with a baseline, such as grpo_clip'
            WHEN own_length IS NULL THEN run_id || ' is no run of GRPO'
            WHEN credit = 'turn' THEN run_id || ' has --credit turn: its advantages are of turns, not of responses'
        END AS problem
    FROM choices
), samples AS (
    SELECT
        run_id, step, example_id, sample_index, policy_tokens(episode, num_response_tokens) AS tokens,
        coalesce(finish_reason = 'length' AND config ->> 'overlong' = 'mask', false) AS is_masked,
        coalesce(shaped_reward, rollouts.reward, 0) AS reward,
        coalesce(rollouts.reward > 0.5 AND NOT isnan(rollouts.reward), false) AS correct
    FROM rollouts JOIN runs USING (run_id)
    WHERE phase = $phase
    WINDOW of_group AS (PARTITION BY run_id, step, example_id)
    QUALIFY  -- dynamic sampling drops groups whose rewards are equal before they are shaped
        $phase <> 'train' OR NOT coalesce((config ->> 'dynamic_sampling')::BOOLEAN, false)
        OR min(coalesce(rollouts.reward, 0)) OVER of_group < max(coalesce(rollouts.reward, 0)) OVER of_group
), grouped AS (
    SELECT
        *,
        reward - avg(reward) OVER (PARTITION BY run_id, step, example_id) AS centered,
        coalesce(stddev_samp(reward) OVER (PARTITION BY run_id, step, example_id), 0) AS spread,
        avg(correct::INT) OVER (PARTITION BY run_id, step, example_id) AS pass_rate,
        coalesce(avg(tokens) FILTER (tokens > 0 AND NOT is_masked) OVER (PARTITION BY run_id, step), 1) AS mean_tokens,
        ntile(4) OVER (PARTITION BY run_id, tokens > 0 ORDER BY tokens, step, example_id, sample_index) AS quarter
    FROM samples
), spread AS (
    SELECT *, stddev_samp(if(spread = 0, 0, centered)) OVER (PARTITION BY run_id, step) AS batch_spread FROM grouped
), weighed AS (
    SELECT
        s.*,
        own,
        CASE  -- of a response: DuckDB evaluates a condition on `checked` alone also for runs without responses
            WHEN problem IS NOT NULL THEN error('objective: ' || problem)
            WHEN is_masked THEN 0
            WHEN loss_type = 'no_baseline' THEN reward
            WHEN spread = 0 THEN 0
            WHEN std = 'group' THEN centered / (spread + eps)
            WHEN std = 'batch' THEN centered / (batch_spread + eps)
            ELSE centered
        END / CASE
            WHEN loss_type = 'kimi' THEN 1
            WHEN length = 'masked_mean' THEN tokens
            WHEN length = 'token_mean' THEN mean_tokens
            ELSE constant
        END AS weight
    FROM spread AS s JOIN checked USING (run_id)
    WHERE tokens > 0
), sides AS (
    SELECT
        run_id, step, example_id, sample_index, tokens, correct, quarter, pass_rate,
        max(weight) FILTER (own) AS weight,
        max(weight) FILTER (NOT own) AS other
    FROM weighed
    GROUP BY ALL
), buckets AS (
    SELECT
        sides.*, kind,
        CASE kind
            WHEN 'correctness' THEN if(correct, 'correct', 'wrong')
            WHEN 'length'
            THEN if(correct, 'correct, ', 'wrong, ') || ['shortest', 'short', 'long', 'longest'][quarter] || ' quarter'
            WHEN 'difficulty'
            THEN CASE
                WHEN pass_rate = 0 THEN 'none of the group correct'
                WHEN pass_rate < 0.5 THEN 'fewer than half correct'
                WHEN pass_rate < 1 THEN 'half or more correct'
                ELSE 'all of the group correct'
            END
            ELSE 'step ' || step || ', ' || example_id || ', sample ' || sample_index
        END AS bucket
    FROM sides, (VALUES ('correctness'), ('length'), ('difficulty'), ('response')) AS kinds (kind)
    WHERE kind = coalesce($kind::VARCHAR, kind) AND (kind <> 'response' OR $kind::VARCHAR = 'response')
)
SELECT
    run_id,
    kind,
    bucket,
    count(*) AS responses,
    avg(tokens) AS tokens,
    round(sum(weight * tokens) / sum(tokens), 15) AS token_weight,
    round(sum(other * tokens) / sum(tokens), 15) AS other_token_weight,
    round(sum(weight * tokens) / count(*), 15) AS response_weight,
    round(sum(other * tokens) / count(*), 15) AS other_response_weight,
    sum(abs(weight) * tokens) / nullif(sum(sum(abs(weight) * tokens)) OVER (PARTITION BY run_id, kind), 0) AS push_share,
    sum(abs(other) * tokens) / nullif(sum(sum(abs(other) * tokens)) OVER (PARTITION BY run_id, kind), 0) AS other_push_share
FROM buckets
GROUP BY run_id, kind, bucket
ORDER BY run_id, kind, min(correct), if(kind = 'difficulty', min(pass_rate), min(quarter)), bucket;
