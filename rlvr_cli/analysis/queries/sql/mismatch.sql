-- How far the trainer's log-probabilities are from the sampler's, in nats per token: over the run, by position, by response length.
-- :phase = "train"
-- plot: x=bucket_from y=mean+largest panels=measure places=yes log=y title="Log-probability, trainer against sampler" y_label="nats per token"

-- mismatch/position/NNNN and mismatch/length/NNNN are means of |trainer - sampler| over the tokens whose position, or whose
-- response's length, is in the bucket that starts at NNNN. A gap that grows with either points to a bug in trainer or sampler.
-- Only those by position have the tokens before --sampling-min-tokens, where the sampler forbids the end of a response.
WITH found AS (
    SELECT
        run_id, step, value,
        regexp_replace(name, '^mismatch/|/[0-9]+$', '', 'g') AS measure,
        try_cast(regexp_extract(name, '^mismatch/(position|length)/([0-9]+)$', 2) AS BIGINT) AS bucket_from
    FROM metrics
    WHERE starts_with(name, 'mismatch/') AND phase = $phase
)
SELECT
    run_id,
    measure,
    bucket_from,
    count(*) AS steps,
    arg_min(value, step) AS first,
    arg_max(value, step) AS last,
    avg(value) AS mean,
    max(value) AS largest,
    arg_max(step, value) AS at_step
FROM found
GROUP BY run_id, measure, bucket_from
ORDER BY run_id, measure, bucket_from;
