-- Signs of collapse: the same response to different questions, the same response twice to one question, and repeated words.
-- :phase = "eval"
-- :step = null
-- :repeating_below = 0.3
-- plot: x=run_id y=shared,duplicates,repeating,distinct_words bars=yes

-- shared: responses that another question also got. duplicates: responses equal to an earlier one to the same question.
-- distinct_words: different words / all words of a response. A response of 20 or more words counts as repeating if this is
-- below :repeating_below. It is naturally lower for long texts: compare steps and runs of similar length.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), texts AS (
    SELECT
        run_id, rollouts.step, response,
        count(*) AS samples,
        count(DISTINCT example_id) AS questions,
        list_filter(string_split_regex(response, '\s+'), lambda word: word <> '') AS words
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
    GROUP BY ALL
), said AS (
    SELECT *, list_unique(words) / nullif(len(words), 0) AS distinct_words FROM texts
)
SELECT
    run_id,
    step,
    sum(samples)::BIGINT AS samples,
    coalesce(sum(samples) FILTER (questions > 1), 0) / sum(samples) AS shared,
    sum(samples - questions) / sum(samples) AS duplicates,
    sum(distinct_words * samples) / sum(samples) FILTER (distinct_words IS NOT NULL) AS distinct_words,
    coalesce(sum(samples) FILTER (distinct_words < $repeating_below AND len(words) >= 20), 0)
        / sum(samples) AS repeating,
    max(samples) AS times,
    arg_max(response, (samples, response)) AS most_frequent_response
FROM said
GROUP BY run_id, step
ORDER BY run_id;
