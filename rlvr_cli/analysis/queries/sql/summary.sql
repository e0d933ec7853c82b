-- Accuracy, categories, lengths and failures of one phase and step, with intervals, and pass@k, best@k and majority@k.
-- :phase = "eval"
-- :step = null
-- plot: none

-- A failed grade (NULL reward) counts as no reward, and is also counted as `ungraded`.
CREATE OR REPLACE TEMP TABLE chosen AS
SELECT
    step, example_id, category,
    coalesce(reward, 0) AS reward,
    reward IS NULL AS ungraded,
    coalesce(reward > 0.5 AND NOT isnan(reward), false) AS correct,
    kind_of_failure(rollouts.reward, failure_kind, grade_error) AS failure_kind,
    policy_tokens(episode, num_response_tokens) AS tokens,
    finish_reason = 'length' AS truncated,
    CASE WHEN NOT isnan(mean_logprob) THEN mean_logprob END AS logprob,
    mean_entropy AS entropy
FROM rollouts
WHERE phase = $phase
  AND step = coalesce($step::BIGINT, (SELECT max(step) FROM rollouts WHERE phase = $phase));

-- samples
SELECT
    max(step) AS step,
    count(*) AS samples,
    count(*) FILTER (correct) AS correct,
    count(*) FILTER (ungraded) AS ungraded,
    favg(reward) AS mean_reward,
    coalesce(bool_and(reward IN (0, 1)), true) AS binary_reward,
    favg(tokens) AS tokens,
    favg(tokens) FILTER (correct) AS tokens_correct,
    favg(tokens) FILTER (NOT correct) AS tokens_wrong,
    favg(truncated::INT) AS truncated,
    favg(entropy) AS entropy,
    favg(logprob) AS logprob,
    (
        SELECT any_value(value) FROM metrics
        WHERE phase = $phase AND step = (SELECT max(step) FROM chosen) AND name = 'sampling/tokens_per_second'
    ) AS tokens_per_second
FROM chosen;

-- questions, by their number of samples n, of correct samples c and their summed reward
SELECT n, c, total, count(*) AS questions
FROM (SELECT count(*) AS n, count(*) FILTER (correct) AS c, sum(reward) AS total FROM chosen GROUP BY example_id)
GROUP BY ALL
ORDER BY ALL;

-- categories
SELECT category, count(*) AS samples, favg(tokens) AS tokens
FROM chosen
GROUP BY ALL
ORDER BY category DESC;

-- questions, by category, number of samples n, and samples in that category; questions with none in it are left out
WITH asked AS (SELECT example_id, count(*) AS n FROM chosen GROUP BY ALL),
     found AS (SELECT example_id, category, count(*) AS hits FROM chosen GROUP BY ALL)
SELECT category, n, hits, count(*) AS questions
FROM found JOIN asked USING (example_id)
GROUP BY ALL
ORDER BY ALL;

-- failures
SELECT failure_kind, count(*) AS samples
FROM chosen
WHERE NOT correct
GROUP BY ALL
ORDER BY samples DESC, failure_kind;

-- its memory is for what is asked next
DROP TABLE chosen;
