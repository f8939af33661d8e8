pragma journal_mode = wal;
begin immediate;

-- Which migrations this database has; "postrider init" goes on from here.
create table if not exists postrider_schema (
  version     integer primary key,
  name        text not null,
  applied_at  integer not null default (cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000)
) strict;

-- Postrider, schema version 1, SQLite 3.37 or newer (STRICT tables).
--
-- A message is written once, into "outbox", and never touched again. What changes about it lives in small
-- tables: it is in exactly one of outbox_queue, outbox_waiting, outbox_dead, outbox_cancelled, or named in a
-- receipt of outbox_sent. The view outbox_status puts the two together; look at messages through it.
--
-- Times are microseconds since 1970 UTC; SQLite's own clock gives milliseconds.
-- There is one shard: SQLite has one writer at a time, so ids commit in order and one relay works the file.

create table outbox (
  id              integer primary key autoincrement,   -- the order within a key; autoincrement: never used twice
  message_id      text not null,                       -- made by the business ("order:4711:paid")
  topic           text not null,
  tag             text,
  message_key     text,                                -- what is kept in order; default aggregate_type:aggregate_id
  aggregate_type  text,
  aggregate_id    text,
  event_type      text,
  schema_version  integer,
  headers         text,                                -- a JSON object of strings
  content_type    text,
  payload         text,                                -- JSON and text, readable
  payload_bytes   blob,                                -- anything else; both null = no payload
  max_attempts    integer,                             -- null = the relay's policy
  due_at          integer,                             -- null = at once
  trace           text,                                -- W3C traceparent
  trace_state     text,                                -- W3C tracestate
  content_hash    integer,                             -- written by the library to tell "same again" from "same id, other content"
  created_at      integer not null default (cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000),
  constraint outbox_message_id_unique unique (message_id),
  constraint outbox_message_id_length check (length(cast(message_id as blob)) between 1 and 255),
  constraint outbox_topic_form check (
    length(cast(topic as blob)) between 1 and 255
    and topic not glob '*[' || char(1) || '-' || char(32) || char(127) || '-' || char(160) || char(8192) || '-'
                            || char(8203) || char(8232) || char(8233) || char(12288) || ']*'),
  constraint outbox_message_key_length check (length(cast(message_key as blob)) between 1 and 255),
  constraint outbox_aggregate_pair check ((aggregate_type is null) = (aggregate_id is null)),
  constraint outbox_one_payload check (payload is null or payload_bytes is null),
  constraint outbox_payload_size check (length(cast(payload as blob)) <= 67108864 and length(payload_bytes) <= 67108864),
  constraint outbox_headers_size check (length(cast(headers as blob)) <= 16384),
  -- A CHECK may hold no subquery, so "all values are strings" is the trigger outbox_headers.
  constraint outbox_headers_form check (headers is null or (json_valid(headers) and json_type(headers) = 'object')),
  constraint outbox_max_attempts_positive check (max_attempts > 0)
) strict;

create table outbox_queue (                            -- ready: due and not settled; a row exists exactly that long
  id     integer primary key,
  lane   text not null,
  bytes  integer not null
) strict;

create table outbox_waiting (                          -- delayed, or failed and to be tried again
  id          integer primary key,
  lane        text not null,
  due_at      integer not null,
  bytes       integer not null,
  attempts    integer not null default 0,              -- tries that count against the budget
  tries       integer not null default 0,              -- publishes that may have reached the sink
  holds_key   integer not null default 0,              -- a retry: the messages of its key wait for it
  last_error  text
) strict;
create index outbox_waiting_due on outbox_waiting (due_at, id);
create index outbox_waiting_holds on outbox_waiting (id) where holds_key;

create table outbox_dead (                             -- given up, kept for a human
  id          integer primary key,
  lane        text not null,
  dead_at     integer not null default (cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000),
  bytes       integer not null,
  attempts    integer not null,
  tries       integer not null,
  holds_key   integer not null default 0,              -- on_dead = block: the messages of its key wait for an operator
  reason      text not null,                           -- permanent | attempts | quarantined
  last_error  text
) strict;
create index outbox_dead_at on outbox_dead (dead_at, id);
create index outbox_dead_holds on outbox_dead (id) where holds_key;

create table outbox_cancelled (                        -- an operator discarded it
  id            integer primary key,
  cancelled_at  integer not null default (cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000),
  cancelled_by  text not null,
  reason        text
) strict;

create table outbox_sent (                             -- receipts: one row per settled batch and 4,096 ids
  bucket    integer not null,                          -- id >> 12
  sent_at   integer not null,
  relay     integer not null,
  n         integer not null,
  sink      text not null,
  ids       text not null,                             -- a JSON array
  evidence  text                                       -- a JSON array parallel to ids: what the sink answered
) strict;
create index outbox_sent_bucket on outbox_sent (bucket);
create index outbox_sent_at on outbox_sent (sent_at, n);

create table outbox_relay (                            -- one row per relay process
  relay         integer primary key,                   -- random, drawn at every process start
  instance      text not null,                         -- the name people see
  version       text not null,
  started_at    integer not null,
  heartbeat_at  integer not null,
  expires_at    integer not null,
  state         text not null default '{}'             -- what "postrider status" shows
) strict;

create table outbox_shard (                            -- one shard; it changes at handover alone
  shard         integer primary key,
  owner         integer,
  token         integer,                               -- drawn at random at every acquisition: the right to read and write
  acquired_at   integer,
  unclean_ends  integer not null default 0,            -- owners in a row that ended without releasing it
  suspect       integer                                -- the message that was being worked on alone when they did
) strict;
insert into outbox_shard (shard) values (0);

create table outbox_audit (                            -- what operators did
  id       integer primary key autoincrement,
  at       integer not null default (cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000),
  actor    text not null,
  action   text not null,                              -- redrive | cancel
  message  integer not null,                           -- outbox.id
  detail   text
) strict;
create index outbox_audit_message on outbox_audit (message);

create trigger outbox_headers before insert on outbox when new.headers is not null begin
  select raise(abort, 'outbox_headers_form: header values must be strings')
  where exists (select 1 from json_each(new.headers) where type <> 'text');
end;

-- Puts each new message into the ready queue or among the waiting, in the producer's own transaction, whichever
-- client inserts it. The lane is the key, else the aggregate, else the message alone.
create trigger outbox_route_ready after insert on outbox
when new.due_at is null or new.due_at <= cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000 begin
  insert into outbox_queue (id, lane, bytes) values (
    new.id,
    coalesce('k:' || new.message_key, 'k:' || new.aggregate_type || ':' || new.aggregate_id, 'm:' || new.message_id),
    coalesce(length(cast(new.payload as blob)), 0) + coalesce(length(new.payload_bytes), 0));
end;
create trigger outbox_route_later after insert on outbox
when new.due_at > cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000 begin
  insert into outbox_waiting (id, lane, due_at, bytes) values (
    new.id,
    coalesce('k:' || new.message_key, 'k:' || new.aggregate_type || ':' || new.aggregate_id, 'm:' || new.message_id),
    new.due_at,
    coalesce(length(cast(new.payload as blob)), 0) + coalesce(length(new.payload_bytes), 0));
end;

-- One row per message. Filter it by id or message_id; to list by state, start from the small table.
create view outbox_status as
select o.id, o.message_id, o.topic, o.message_key, o.aggregate_type, o.aggregate_id, o.event_type, o.created_at,
       case when d.id is not null then 'DEAD'
            when q.id is not null or w.id is not null then 'PENDING'
            when c.id is not null then 'CANCELLED'
            when s.sent_at is not null then 'SENT'
            else 'UNACCOUNTED' end as state,
       coalesce(w.attempts, d.attempts, 0) as attempts,
       coalesce(w.tries, d.tries) as tries,
       w.due_at,
       coalesce(w.last_error, d.last_error) as last_error,
       s.sent_at, s.sink,
       (select json_extract(s.evidence, '$[' || j.key || ']') from json_each(s.ids) j where j.value = o.id) as evidence,
       d.dead_at, d.reason as dead_reason,
       c.cancelled_at, c.cancelled_by, c.reason as cancel_reason
from outbox o
left join outbox_queue q on q.id = o.id
left join outbox_waiting w on w.id = o.id
left join outbox_dead d on d.id = o.id
left join outbox_cancelled c on c.id = o.id
left join outbox_sent s on s.rowid = (
  select r.rowid from outbox_sent r
  where r.bucket = o.id >> 12 and exists (select 1 from json_each(r.ids) j where j.value = o.id)
  order by r.sent_at desc limit 1);

-- The consumer's side: message ids already handled. In the database of the consumer's effects.
create table inbox (
  consumer      text not null,
  message_id    text not null,
  content_hash  integer,                               -- of what was received; the same id with other content is an alarm
  position      integer,                               -- the message's id in its outbox
  handled_at    integer not null default (cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000),
  primary key (consumer, message_id)
) strict, without rowid;
create index inbox_handled_at on inbox (handled_at);

create table inbox_dead (                              -- messages a consumer gave up on, kept for a human
  consumer    text not null,
  message_id  text not null,
  topic       text not null,
  body        blob,
  headers     text,
  attempts    integer not null,
  last_error  text not null,
  dead_at     integer not null default (cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000),
  primary key (consumer, message_id)
) strict, without rowid;

insert into postrider_schema (version, name) values (1, 'outbox');

commit;
