-- A row for each search (rlvr discover): attempts, how many are valid, first and best score beside that of the start, tokens and seconds.
-- plot: none

WITH tried AS (
    SELECT
        run_id,
        candidate.number AS number,
        CASE WHEN candidate.points_sha256 IS NOT NULL THEN reward END AS score,
        num_prompt_tokens + num_response_tokens AS tokens,
        candidate.seconds AS seconds
    FROM rollouts
    WHERE candidate IS NOT NULL
)
SELECT
    run_id,
    count(*) AS attempts,
    count(score) AS valid,
    count(score) / count(*) AS valid_share,
    any_value(metadata ->> '$.start.score')::DOUBLE AS start_score,
    arg_min(score, number) AS first_score,
    max(score) AS best_score,
    arg_min(number, (-score, number)) FILTER (score IS NOT NULL) AS best_attempt,
    sum(tokens)::BIGINT AS tokens,
    sum(seconds) AS program_seconds
FROM tried JOIN runs USING (run_id)
GROUP BY run_id
ORDER BY run_id;
